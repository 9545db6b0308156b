"""Frozen networks that turn tiles into features: one embedded, others by name, from a file, or the user's own."""

from psamil.slides.encoders.cards import EncoderCard
from psamil.slides.encoders.encoder import Encoder
from psamil.slides.encoders.preprocessing import Preprocessing
from psamil.slides.encoders.registry import list_encoders, load_encoder, register_encoder

__all__ = ["Encoder", "EncoderCard", "Preprocessing", "list_encoders", "load_encoder", "register_encoder"]
