"""The audit: what a loop carries and no loss sees."""
