"""The stages of a step, as functions of the values that pass between them."""
