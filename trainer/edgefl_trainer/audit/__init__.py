"""What an attacker who holds what a finished run sent learns of the pictures; one attack a file. Values in, values out.

Guarantees: each figure stands beside what no payload at all would give (`floor`) and what an unprotected input gives
(`control`); where the control fails, the line is inconclusive and never safe. Source: docs/security.md 7, checks 53 and
54.
"""
