"""What every process of forq shares: memory they look into, process trees, control groups, sockets, lines."""
