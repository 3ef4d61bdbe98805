/* The interface of engine/ranks/ for other rooms. README.md has an overview. */
#ifndef ENGINE_RANKS_RANKS_H
#define ENGINE_RANKS_RANKS_H

#include "engine/common/common.h"
#include "engine/store/store.h"

/* members.c: Removes the files of dead ranks from data/r. The caller holds the publish lock. */
ckd_status ranks_recover(const ckd_store *store, ckd_error *err);

/*
 * All ranks call it, each with the status of its work; `why` belongs to an error. If all succeeded, `data` becomes that
 * of rank 0; `size` is the same on all ranks, and may be 0. Otherwise all get the error of the first rank that failed.
 * Further errors: STATE (an earlier exchange was not completed), those of the transport.
 */
ckd_status ranks_agree(ckd_ranks *g, ckd_status own, const ckd_error *why, void *data, size_t size,
                       ckd_error *err);
/*
 * All ranks call it, each with as many bytes. *out, of world * size bytes, gets those of all, by rank; NULL: this rank
 * does not want them. Errors: as for ranks_agree.
 */
ckd_status ranks_collect(void *out, ckd_ranks *g, const void *data, size_t size, ckd_error *err);
/*
 * Can the ranks go on with this group? Errors: the reason why an exchange was not completed. No further exchange will
 * complete then, and the others may wait for this rank until it leaves.
 */
ckd_status ranks_check(const ckd_ranks *g, ckd_error *err);
/*
 * As ckd_ranks_join. stop: may end the wait for the other ranks in the store's directory; NULL: only the timeout ends
 * it.
 */
ckd_status ranks_join(ckd_ranks **out, ckd_store *store, const ckd_ranks_options *options,
                      const cancel_check *stop, ckd_error *err);
/*
 * Knows more of other ranks than the store's directory shows: a process that is stopped, or whose machine hangs, still
 * has its lock. look: may a rank that has been waited for so long still come? It is asked again and again. Errors: STATE;
 * then the rank counts as dead, and the group ends for all.
 */
typedef struct rank_watch {
    ckd_status (*look)(void *context, uint32_t rank, uint64_t waited_ns, ckd_error *err);
    void *context;
} rank_watch;
/* From now on this rank asks the watch while it waits. Does nothing if the ranks have a transport of their own. */
void ranks_watch(ckd_ranks *g, const rank_watch *watch);
/*
 * As ckd_ranks_leave, for a rank that will take part in no further exchange, whatever the others do. Rank 0 does not
 * wait for them, so they notice that it is gone.
 */
void ranks_break_off(ckd_ranks *g);

#endif
