"""What stages that decode a token at a time share: cache, batch, sampling, text."""
