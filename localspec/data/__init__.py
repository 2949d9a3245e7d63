"""Package data: the default drafter."""
