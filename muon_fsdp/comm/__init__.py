"""Communicate between ranks: transfers of shards, agreement before a step, and process groups of our own."""
