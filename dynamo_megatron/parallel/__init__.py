"""Every collective of the trainer but the token statistics' own: groups and stores passed in."""
