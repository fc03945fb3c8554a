"""The first run on a Trainium: all steps of an SDK by one command, with one file to send back. See
docs/first-device-run.md.
"""
