"""A proposer and an editor write the one-sentence summary of an abstract, paid by human summaries.

The proposer reads the abstract, and the editor reads the proposal.
"""
