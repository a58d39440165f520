"""A deterministic simulator of the mesh: faults on virtual time, drawn from a seed, and checkers of every invariant.

What runs is everything that is ours, above the bytes of a stream: the node's engine with its core, registry and links
(`agent_sdk.testing.InProcessNode`), and the whole SDK with agents, handlers, clients, links and redialling. Only the
outside is simulated: processes, clocks, the network, randomness.

The choice: driving the pure core by scripted processes (as `tests/support/core.py` does) would be some times faster,
but half of the promises are kept by the SDK (joining, replaying, sending again, its own limits), and its asyncio code
is where faults meet it at the worst moment. With a loop for each process on one virtual clock (`loop`) that code runs
as it is, a seed takes a fraction of a second, and a kill is a kill: a loop that is never run again.
"""
