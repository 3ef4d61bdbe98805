/*
 * Waits for the agent of the store. A separate process asks the agent, because a thread that waits for an answer sees
 * no signals.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "supervise/internal.h"

typedef struct settling {
    const supervise_options *options;
    const char *agent;
} settling;

static int settle(const void *context) {
    const settling *with = context;
    ckd_error why;
    ckd_status status = ckd_agent_settle(with->options->store, with->agent, with->options->run, &why);
    if (status == CKD_OK || status == CKD_E_NOT_FOUND) {
        return 0;
    }
    dprintf(STDOUT_FILENO, "%s", why.message);
    return 1;
}

void agent_await(const supervise_options *options, const sigset_t *mask, uint64_t limit_s,
                 bool (*stop)(void *context), void *context) {
    const char *agent = getenv("CKPTDELTA_AGENT");
    helper h;
    if (!agent || !agent[0] || strcmp(agent, "0") == 0) {
        return;
    }
    helper_start(&h, &(helper_orders){.work = settle,
                                      .work_context = &(settling){options, agent},
                                      .mask = mask,
                                      .limit_s = limit_s,
                                      .listens = true});
    if (!helpers_wait(&h, 1, stop, context) || h.late) {
        supervise_say(options, "no longer waits for what the agent is saving");
    } else if (h.status != 0) {
        supervise_say(options, "the agent: %s", h.answer ? h.answer : "it cannot be reached");
    }
    helper_free(&h);
}
