"""Whether a model that was quantized, pruned or converted still says what its baseline says."""

from __future__ import annotations

from kimicore.verify.comparing import verify
from kimicore.verify.opened import ModelChoice
from kimicore.verify.prompts import CATEGORIES, Corpus, Prompt, built_in, from_files
from kimicore.verify.report import REPORT_FILE, ComparedModel, Report, verdict
from kimicore.verify.scorer import Scorer
from kimicore.verify.tally import Estimate, Measured, Scores

__all__ = [
    "CATEGORIES",
    "REPORT_FILE",
    "ComparedModel",
    "Corpus",
    "Estimate",
    "Measured",
    "ModelChoice",
    "Prompt",
    "Report",
    "Scorer",
    "Scores",
    "built_in",
    "from_files",
    "verdict",
    "verify",
]
