"""From text to updates: tokenizer, encoded corpus, batches."""
