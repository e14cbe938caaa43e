"""Problems as tokens: what SFT is given, limited train sets, tokenizers of characters and of transformers."""

import pickle

import numpy as np
import pytest
from math_play import WITH_12_34, make, make_vec, play

from llmgym.tasks.problems import MathTask, Problem
from llmgym.tokenizers import as_tokenizer, character_tokenizer


def test_a_limited_train_set_is_what_sft_and_rl_share():
    task = make(n_train=250, task_seed=3).unwrapped.task
    assert task.num_tasks == len({p.prompt for p in task.problems}) == 250
    prompts, responses = task.demonstrations()
    assert [task.text(p) for p in prompts] == [p.prompt for p in task.problems]
    assert all(response[-1] == task.eos_id for response in responses)
    assert [p.tolist() for p in task.prompts] == [p.tolist() for p in prompts]
    few, again, others = (task.demonstrations(50, seed)[0] for seed in (1, 1, 2))
    assert [p.tolist() for p in few] == [p.tolist() for p in again] != [p.tolist() for p in others]
    assert len({task.text(p) for p in few}) == 50 and {task.text(p) for p in few} <= {
        p.prompt for p in task.problems
    }
    held_out = make(n_train=250, split="held_out").unwrapped.task
    assert held_out.num_tasks == make(split="held_out").unwrapped.task.num_tasks


def test_demonstrations_that_cannot_be_given():
    with pytest.raises(ValueError, match="n: got 251; allowed: at most 250"):
        make(n_train=250).unwrapped.task.demonstrations(251)
    with pytest.raises(
        ValueError, match=r"max_new_tokens: got 2; the solution of '\d\d\+\d\d=' has [34] tokens"
    ):
        make(max_new_tokens=2).unwrapped.task.demonstrations()
    unsolved = MathTask(
        "own", [Problem("a", "1", None)], [Problem("b", "1", None)], [Problem("c", "1", None)]
    )
    with pytest.raises(ValueError, match="max_new_tokens: got None; own has no solutions that would tell it"):
        make(task=unsolved)
    with pytest.raises(ValueError, match="demonstrations: no solution is known of 'a'"):
        make(task=unsolved, max_new_tokens=3).unwrapped.task.demonstrations()


# ------------------------------------------------------------------------------------ tokenizers


def test_characters():
    tokens = character_tokenizer("ab", eos="$")
    assert tokens.encode("abba").tolist() == tokens.encode_prompt("abba").tolist() == [0, 1, 1, 0]
    assert (tokens.vocab_size, tokens.eos_id, tokens.decode([1, 2, 0])) == (3, 2, "b$a")
    assert tokens.encode("").shape == (0,) and tokens.encode("").dtype == np.int64
    with pytest.raises(ValueError, match="text: got 'c'; allowed: 'a', 'b', '\\$'"):
        tokens.encode("abc")
    with pytest.raises(ValueError, match="eos: got 'a', which is one of the characters"):
        character_tokenizer("ab", eos="a")
    with pytest.raises(ValueError, match="symbols: got .*; allowed: each only once"):
        character_tokenizer("aba")


def byte_pairs():
    """A byte-level tokenizer of transformers that puts <bos> first and knows pieces of two digits."""
    tokenizers = pytest.importorskip("tokenizers", reason="transformers is in the extra llm")
    transformers = pytest.importorskip("transformers", reason="transformers is in the extra llm")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([f"{a}+{b}={a + b}" for a in range(10, 60) for b in range(10, 60)], trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", bpe.token_to_id("<bos>"))]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<bos>", eos_token="<eos>")


def test_a_tokenizer_of_the_transformers_library():
    tokenizer = byte_pairs()
    env = make_vec(8, tokenizer=tokenizer, **WITH_12_34)
    task = env.unwrapped.task
    assert (task.vocab_size, task.eos_id) == (len(tokenizer), tokenizer.eos_token_id)
    assert env.single_action_space.n == len(tokenizer)
    prompts, responses = task.demonstrations()
    assert all(prompt[0] == tokenizer.bos_token_id for prompt in prompts)
    assert task.text(prompts[0]) == "<bos>" + task.problems[0].prompt
    assert min(map(len, responses)) == 2  # a sum is one piece of the vocabulary: fewer tokens than digits
    env.reset(seed=0, options={"task_id": np.arange(8)})
    rewards, _ = play(env, responses[:8])
    assert (rewards == 1).all()
    number = next(k for k, p in enumerate(task.problems) if p.prompt in ("12+34=", "34+12="))
    four, six = (tokenizer.encode(digit, add_special_tokens=False)[0] for digit in "46")
    env = make_vec(2, tokenizer=tokenizer, max_new_tokens=4, **WITH_12_34)
    env.reset(options={"task_id": number})
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    rewards, info = play(env, [[four, six, eos], [four, bos, six, eos]])
    assert rewards.tolist() == [1, 0]  # a special token between two digits does not join them
    pickle.loads(pickle.dumps(env.unwrapped)).reset(seed=0)


def test_bad_tokenizers():
    with pytest.raises(
        TypeError, match="tokenizer: got int; allowed: a llmgym.tokenizers.Tokenizer, or one with"
    ):
        make(tokenizer=3)
    tokenizer = byte_pairs()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="tokenizer: eos_token_id is None"):
        as_tokenizer(tokenizer)
    with pytest.raises(ValueError, match="text: got '='"):
        make(tokenizer=character_tokenizer("0123456789+"))
