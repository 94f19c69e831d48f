"""Generated from ``protos/`` by ``make proto``; never edited."""
