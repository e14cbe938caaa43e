"""A separate Python process for code that nobody has read: `host` starts it, `child` runs inside.

`child`, `isolation` and `plain_data` are loaded by an interpreter that has the standard library only
and knows this folder as the package `sandbox`: they import nothing else, and each other relatively.
"""
