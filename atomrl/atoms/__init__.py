"""Atoms: pure tensor functions, one equation each. `atomrl atoms` lists them, `help(atom)` teaches one."""
