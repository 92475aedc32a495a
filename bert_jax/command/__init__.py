"""What every command shares: flags, dispatch, exit codes, progress."""
