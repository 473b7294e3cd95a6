"""Find the state variables that a loop carries on and no loss sees."""
