"""A language model that fits in a pocket: scanned layers, a KV cache, and the step that trains it."""

from pocketlm.config import Config
from pocketlm.decoding import decode_step, generate
from pocketlm.model import Decoder
from pocketlm.probe import Probe
from pocketlm.training import make_optimizer, train_step

__all__ = ["Config", "Decoder", "Probe", "decode_step", "generate", "make_optimizer", "train_step"]
