"""A conversation agent answers requests that may be harmful, as an array environment and as text.

A feedback agent judges each response and advises a revision; in one setting a third role gives the verdicts. The
conversation agent is paid for a response that is neither unsafe nor over-refusing, the feedback agent for right labels
and for revisions that improve.
"""
