"""forqctl, the command line of the control socket. Imports little, so that it starts fast."""
