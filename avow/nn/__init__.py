"""Modules over any method: attention, positions, and language models that decode token by token."""

from avow.nn.attention import Attention as Attention
from avow.nn.build import build as build
from avow.nn.cache import Cache as Cache
from avow.nn.config import ModelConfig as ModelConfig
from avow.nn.equivariance import Equivariance as Equivariance
from avow.nn.equivariance import check_permutation_equivariance as check_permutation_equivariance
from avow.nn.key_value_cache import KeyValueCache as KeyValueCache
from avow.nn.perceiver import PerceiverLM as PerceiverLM
from avow.nn.positions import Learned as Learned
from avow.nn.positions import Rotary as Rotary
from avow.nn.positions import Sinusoidal as Sinusoidal
from avow.nn.recurrent import GradientHorizon as GradientHorizon
from avow.nn.recurrent import RecurrentCell as RecurrentCell
from avow.nn.recurrent import gradient_horizon as gradient_horizon
from avow.nn.shard import Shard as Shard
from avow.nn.transformer import Block as Block
from avow.nn.transformer import TransformerLM as TransformerLM
