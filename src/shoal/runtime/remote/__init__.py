"""What workers reach over sockets of their own: parameter servers, and the peers of AD-PSGD."""
