"""The page of `jaxmarl-llm view` in a real browser: a driver of Chromium, and the pictures of the documentation."""
