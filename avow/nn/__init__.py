"""Modules over any method: attention, language models that decode token by token, and a certified cache of tokens.

Models:
    config            ModelConfig, what a model is made of
    attention         Attention: projections and heads around any method; Learned, Sinusoidal, Rotary positions; Shard
    memory            what attention keeps: its random draw, and what a decoder has read; Cache, that of a whole model
    transformer       TransformerLM, its Block, and what all models share
    perceiver         PerceiverLM: the past in learned latents; build, the model of any config
Tokens that are attended to with a certificate: KeyValueCache, and what its steps cost, of `avow.decode`.
Questions asked of a module:
    recurrent         RecurrentCell, and how far back its gradients reach
    equivariance      whether it treats its tokens as a set
"""

from avow.decode.key_value_cache import KeyValueCache as KeyValueCache
from avow.decode.plan import DecodePlan as DecodePlan
from avow.decode.plan import share_of_heads as share_of_heads
from avow.nn.attention import Attention as Attention
from avow.nn.attention import Learned as Learned
from avow.nn.attention import Rotary as Rotary
from avow.nn.attention import Shard as Shard
from avow.nn.attention import Sinusoidal as Sinusoidal
from avow.nn.config import ModelConfig as ModelConfig
from avow.nn.equivariance import Equivariance as Equivariance
from avow.nn.equivariance import check_permutation_equivariance as check_permutation_equivariance
from avow.nn.memory import Cache as Cache
from avow.nn.perceiver import PerceiverLM as PerceiverLM
from avow.nn.perceiver import build as build
from avow.nn.recurrent import GradientHorizon as GradientHorizon
from avow.nn.recurrent import RecurrentCell as RecurrentCell
from avow.nn.recurrent import gradient_horizon as gradient_horizon
from avow.nn.transformer import Block as Block
from avow.nn.transformer import TransformerLM as TransformerLM
