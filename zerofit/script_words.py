"""What calls and models in a script can be: the words of ScriptFacts.

Apart from it, as the rules name them and need none of its classes.
"""

from enum import StrEnum


class Action(StrEnum):
    """What a call in the source does, as far as rules care."""

    MAKE_ACCELERATOR = "Accelerator()"
    MAKE_ARGUMENTS = "TrainingArguments()"
    PARSE_ARGUMENTS = "HfArgumentParser.parse_args_into_dataclasses()"
    """Makes TrainingArguments of the command line."""
    PARSE_STRICTLY = "ArgumentParser.parse_args()"
    """Ends the script at an argument that it does not know."""
    MAKE_HF_CONFIG = "HfDeepSpeedConfig()"
    MAKE_PLUGIN = "DeepSpeedPlugin()"
    MAKE_TRAINER = "Trainer()"
    MAKE_MODEL = "a model is made"
    INITIALIZE = "deepspeed.initialize()"
    PREPARE = "Accelerator.prepare()"
    RESIZE = "resize_token_embeddings()"
    COMPILE = "torch.compile()"
    CHECKPOINT_ACTIVATIONS = "gradient_checkpointing_enable()"
    SET_LEAF_MODULES = "set_z3_leaf_modules()"
    ACCUMULATE = "Accelerator.accumulate() or no_sync()"
    FORWARD = "model()"
    GENERATE = "generate()"
    GENERATE_TOGETHER = "zerofit.generate()"
    """Keeps the ranks in step by itself; every rank calls it."""
    BACKWARD = "backward()"
    BACKWARD_OF_LOSS = "loss.backward()"
    """Of a tensor, past the Accelerator and the engine."""
    CLIP = "clip_grad_norm_()"
    STEP = "optimizer.step()"
    SAVE_PRETRAINED = "save_pretrained()"
    STATE_DICT = "state_dict()"
    GET_STATE_DICT = "Accelerator.get_state_dict()"
    SAVE_MODEL = "save_model()"
    SAVE_16BIT_MODEL = "save_16bit_model()"
    GATHER_PARAMETERS = "GatheredParameters()"
    SAVE_STATE = "save_state()"
    SAVE_CHECKPOINT = "save_checkpoint()"
    WAIT = "wait_for_everyone() or barrier()"
    GATHER = "gather() or reduce()"
    TRAIN = "Trainer.train()"
    EVALUATE = "Trainer.evaluate() or predict()"


class ModelSource(StrEnum):
    """How a model is made."""

    PRETRAINED = "from_pretrained()"
    CONFIG = "from_config()"
    CLASS = "a class of transformers, called"
    OWN_CLASS = "a class of the script"


class ModelState(StrEnum):
    """What became of a model up to a call."""

    PLAIN = "plain"
    ENGINE = "engine"
    """What prepare() or deepspeed.initialize() returned."""
    IN_ENGINE = "in engine"
    """The module within an engine."""
