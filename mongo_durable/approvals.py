"""An approval holds for what was approved, and for nothing else: its digest is kept beside the decision, and looked at again before the deed."""

from __future__ import annotations

from typing import Any

from mongo_durable.errors import ProposalChanged
from mongo_durable.protocol.canonical import digest
from mongo_durable.protocol.values import encode


def proposal_digest(proposal: Any) -> str:
    """The digest of a proposal: 32 hexadecimal digits, the same for equal values in every process and release.

    Keep it with the decision, in the step that gets the answer: `{"approved": True, "digest": proposal_digest(proposal)}`.

    Args:
        proposal: A JSON-safe value, or a Pydantic model, which counts as what it dumps.

    Raises:
        NotJsonSafe: Something in it is neither.
    """
    dump = getattr(proposal, "model_dump", None)
    return digest(encode(dump(mode="json") if dump is not None else proposal))


def check_proposal(proposal: Any, approved_digest: str) -> None:
    """Call this in the activity that does the deed, before it: the proposal is the one that was approved.

    Raises:
        ProposalChanged: It is another one.
    """
    found = proposal_digest(proposal)
    if found != approved_digest:
        message = f"what was approved has the digest {approved_digest}, what is to be done now {found}: ask for approval again"
        raise ProposalChanged(message, expected=approved_digest, found=found)
