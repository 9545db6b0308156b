"""Feature files of the field, each opened as what it is."""
