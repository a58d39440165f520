"""What `tools/fuzz.py` and the fuzz tests share: messages nobody would send, and the worlds they are thrown at."""
