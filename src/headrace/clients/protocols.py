"""The protocols that there is a client for, by name, each behind the face of face.py."""

from typing import Final

from headrace.clients import blipmq_face, felix_face, relink_face
from headrace.clients.face import Client

# A protocol joins with one entry.
CLIENTS: Final[dict[str, Client]] = {
    "blipmq": blipmq_face.CLIENT,
    "felix": felix_face.CLIENT,
    "relink": relink_face.CLIENT,
}
