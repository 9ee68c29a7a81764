"""Looking at memory: one reading of a device, and a ledger of live storages by category."""
