"""`roll report`: the outputs of a run as one page that opens anywhere, without a network or a server.

Numbers on the page are those of the files and are never rounded before they are embedded. The page says what was left
out to keep it small.
"""
