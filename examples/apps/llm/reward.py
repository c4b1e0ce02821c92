"""Language models tuned on rewards of what they write, by forward passes only.

    python -m examples.apps.llm.reward  # a small model that learns to add
    python -m examples.apps.llm.reward --model FOLDER --task gym:chain_sum \\
        --reward gym=1 --reward format=0.2

Each step, a population around the parameters writes replies to the same prompts.
Reward functions score them in processes of their own, and an evolution strategy weights
the members by their shaped rewards. A journal has all rewards: the same command resumes
a run that was cut. The output folder gets the tuned adapter, samples, and a picture.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    # Imported here, because each process that runs reward functions imports this
    # module again: it needs neither JAX nor the model.
    from examples.apps.llm import reward_run

    reward_run.main(argv)


if __name__ == "__main__":
    main()
