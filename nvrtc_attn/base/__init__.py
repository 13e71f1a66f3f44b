"""Tables and small tools that know nothing of attention: dtypes, architectures, errors, variables, logging, version.

Imports the standard library alone, because the doctor speaks where numpy is broken.
"""
