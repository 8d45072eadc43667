"""Services that workers reach over TCP sockets: parameter servers, and the peers of AD-PSGD."""
