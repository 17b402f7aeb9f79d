"""Everything that passes between ranks."""
