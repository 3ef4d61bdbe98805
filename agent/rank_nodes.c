/*
 * The nodes of ranks whose agents save together. A process that is stopped, or whose machine hangs, holds its locks in
 * the store, so other ranks would wait for it until the timeout. Its node shows no sign of life.
 */
#include "agent/internal.h"

#include <stdlib.h>

#include "base/hash.h"
#include "engine/ranks/ranks.h"

struct rank_nodes {
    const tier *of;
    uint32_t world;
    size_t hosts[]; /* by rank; a number that is none of a host: not in this agent's list */
};

static uint64_t name_hash(const tier *t, size_t host) {
    const char *name = t->hosts.items[host].name;
    return hash64(name, strlen(name));
}

/*
 * The node must have been silent for four silences, and this rank must have waited as long: a network that is cut ends
 * no exchange that makes progress through the store.
 */
static ckd_status look(void *context, uint32_t rank, uint64_t waited_ns, ckd_error *err) {
    const rank_nodes *n = context;
    const tier *t = n->of;
    size_t host = n->hosts[rank];
    uint64_t patience_ns = peer_patience_ns(t->node);
    if (host >= t->hosts.count || waited_ns < patience_ns || peer_silence_ns(t->node, host) < patience_ns) {
        return CKD_OK;
    }
    return err_set(err, CKD_E_STATE,
                   "rank %u of %u does not come, as node %s has shown no sign of life for more than %llu s",
                   (unsigned)rank, (unsigned)n->world, t->hosts.items[host].name,
                   (unsigned long long)(patience_ns / 1000000000));
}

/* Lists of nodes may differ, so nodes are known by their names. */
static rank_nodes *find_nodes(const tier *t, const uint64_t *names, uint32_t world) {
    rank_nodes *n = calloc(1, sizeof(*n) + world * sizeof(n->hosts[0]));
    if (n) {
        n->of = t;
        n->world = world;
    }
    for (uint32_t rank = 0; n && rank < world; rank++) {
        size_t host = 0;
        while (host < t->hosts.count && name_hash(t, host) != names[rank]) {
            host++;
        }
        n->hosts[rank] = host;
    }
    return n;
}

ckd_status rank_nodes_watch(rank_nodes **out, tier *t, ckd_ranks *ranks, uint32_t world, ckd_error *err) {
    uint64_t own = name_hash(t, t->hosts.self), *names = calloc(world, sizeof(*names));
    ckd_status status = ranks_collect(names, ranks, &own, sizeof(own), err);
    *out = status == CKD_OK && names ? find_nodes(t, names, world) : NULL;
    if (*out) { /* without memory for it, only the timeout ends an exchange */
        ranks_watch(ranks, &(rank_watch){.look = look, .context = *out});
    }
    free(names);
    return status;
}
