"""What each verb does, as a function: the command line parses, calls one of these, and prints what it returns."""
