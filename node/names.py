"""Names that people can say, made from node ids."""

import hashlib

ADJECTIVES = (
    "agile amber bold brave bright brisk calm clever cosmic crisp eager early fair fleet gentle golden "
    "happy honest humble jolly keen kind lively lucid lunar merry mild noble patient polar proud quick "
    "quiet rapid ready royal rustic sage silent silver sleek smart snowy solar steady stellar sunny swift "
    "tidal tidy trusty velvet vivid warm wild wise witty young zesty azure coral misty olive teal"
).split()
ANIMALS = (
    "badger beaver bison bobcat camel condor coyote crane curlew dingo dolphin eagle egret falcon ferret finch "
    "fox gazelle gecko gibbon heron hare ibex iguana impala jackal jaguar kestrel koala lark lemur leopard "
    "llama lynx magpie marlin marten mole moose newt ocelot orca osprey otter owl panda petrel pika "
    "plover puffin puma quail raven robin seal shrew sparrow stork swan tapir thrush toucan walrus wren"
).split()


def spoken_name(node_id: str) -> str:
    """A name such as `brisk-otter`, always the same for the same node."""
    digest = hashlib.sha256(node_id.encode()).digest()
    return f"{ADJECTIVES[digest[0] % len(ADJECTIVES)]}-{ANIMALS[digest[1] % len(ANIMALS)]}"
