"""Atoms: pure tensor functions, one equation each. `atomrl explain --atoms` lists them, `help(atom)` teaches one."""
