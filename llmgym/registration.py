"""All environment ids, in one table."""

from dataclasses import dataclass

import gymnasium as gym


@dataclass(frozen=True)
class EnvironmentId:
    """An id and where its classes are, as strings: they are imported when one is made."""

    id: str
    entry_point: str
    vector_entry_point: str


ENVIRONMENTS = (
    EnvironmentId(
        "AnswerPool-v0",
        "llmgym.answer_pool_env:AnswerPoolEnv",
        "llmgym.answer_pool_env:AnswerPoolVectorEnv",
    ),
    EnvironmentId(
        "TokenGeneration-v0",
        "llmgym.token_generation:TokenGenerationEnv",
        "llmgym.token_generation:TokenGenerationVectorEnv",
    ),
    EnvironmentId(
        "VerifiableMath-v0",
        "llmgym.verifiable_math:VerifiableMathEnv",
        "llmgym.verifiable_math:VerifiableMathVectorEnv",
    ),
    EnvironmentId(
        "MathText-v0",
        "llmgym.math_text:MathTextEnv",
        "llmgym.math_text:MathTextVectorEnv",
    ),
)


def register_environments() -> None:
    """Register every id of the table with Gymnasium; ids it already has are left alone."""
    for environment in ENVIRONMENTS:
        if environment.id not in gym.registry:
            gym.register(
                environment.id,
                entry_point=environment.entry_point,
                vector_entry_point=environment.vector_entry_point,
            )
