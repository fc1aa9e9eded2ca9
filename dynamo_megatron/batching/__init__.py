"""Pure index work: sequences into a batch, a batch into mini-batches, mini-batches into rows."""
