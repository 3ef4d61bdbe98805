/* An agent and its trainers as processes, for tests that kill and stop them. */
#ifndef TESTS_SUPPORT_AGENTS_H
#define TESTS_SUPPORT_AGENTS_H

#include <sys/types.h>

#include "include/ckptdelta.h"

#define ROWS 400 /* of the trainers */

/*
 * While there is a file full_path, an agent's disk is full; full_chunks_path: but for small files; slow_path: it takes
 * no values.
 */
extern char store[600], agent_socket[600], said_path[600], full_path[600], full_chunks_path[600],
    slow_path[600];
extern const char *agent_local; /* the agent's folder on a local disk; NULL: it has none */
extern double agent_store_every_s;
extern const char
    *agent_unread; /* an agent once cannot read a message of ranks whose name ends so; NULL: it can */

/* Sets the paths in a new folder, which is then *state. */
int agent_set_up(void **state);
/* Returns when trainers can connect. budget 0: as usual. */
pid_t start_agent(uint64_t budget);
void stop_agent(pid_t agent);
/* number: the signal that ends it; 0: it ends by itself, and well. */
void end_process(pid_t process, int number);
/* What the agent shows of the first of its sessions. count: how many it has. */
ckd_agent_session session_shown(size_t *count);

/* Agents and sessions say to one file what they have to say. */
void say(void *context, const char *message);
unsigned times_said(const char *text);
/* Static; the next call overwrites what they point to. */
ckd_session_options options_with(const char *agent);
/*
 * A trainer in a process of its own: it goes on from the newest state, and saves until it is killed. It reports its
 * steps. until: the last step, after which it closes its session.
 */
pid_t start_trainer(int *steps, uint64_t until);
uint64_t await_step(int steps, uint64_t step);
/* Returns the last step that it reported before it ended. */
uint64_t last_step(int steps, uint64_t seen);
/* Restores in this process, and checks that the state is that of its step, which is `step` or a later one. */
void restore_and_check(const char *dir, const char *agent, uint64_t step);
void make_file(const char *path);

#endif
