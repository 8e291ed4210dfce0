"""An example: many children on several processes share a model that serves few at once."""
