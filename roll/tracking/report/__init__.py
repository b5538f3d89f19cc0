"""`roll report`: what a run left behind as one page that opens anywhere, without network and without a server.

Reading (`run_files`), choosing and thinning out (`panels`, `lanes`, `excerpts`), judging (`findings`) and writing
(`page`) are apart. Numbers on the page are those of the files, never rounded before they are embedded; what had to be
left out to keep the page small is said on it.
"""
