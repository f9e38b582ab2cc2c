"""An echo on every engine: through polyfed, and on the bare runtime without anything of polyfed.

The server sends an array to each client, each client adds a number of its own to it and returns the result, and the
server sums what comes back. Both rivals do the same arithmetic, so they must end in the same bits.
"""
