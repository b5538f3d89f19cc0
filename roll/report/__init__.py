"""`roll report`: the outputs of a run as one HTML page that needs neither network nor server.

The page has the exact numbers of the files, without rounding. It says what was left out to keep it small.
"""
