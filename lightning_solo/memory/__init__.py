"""Memory: readings of a device, a ledger of live storages by category, and slabs of host memory."""
