"""The invariants, one file each: its row, its judgement of a call that ran, and its findings, which word themselves.

``judge(ran)`` yields findings and notes, as the function of an invariant of the user's own yields breaches. Only a file with a ``ROW`` is an invariant:
`judge` asks them and those of the user, and `advice` is a part of `memory`.
"""
