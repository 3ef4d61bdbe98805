/* Asks Slurm to start the job again, without the hosts that were taken out. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "supervise/internal.h"

#define LIMIT_S 60

/* The number of the job that this process is a part of; NULL: none. */
static const char *job_number(void) {
    const char *id = getenv("SLURM_JOB_ID");
    return id && *id && id[strspn(id, "0123456789_")] == '\0' ? id : NULL;
}

bool requeue_possible(void) {
    return job_number() != NULL;
}

static void add_words(host_list *to, const char *words) {
    char *copy = strdup(words ? words : ""), *rest = copy;
    ckd_error err;
    for (char *word; copy && (word = strsep(&rest, " "));) {
        if (*word) {
            hosts_add(to, word, &err);
        }
    }
    free(copy);
}

/* Adds the hosts that the job's owner has excluded, as Slurm prints them, because an update would replace them. */
static void add_own(host_list *to, const char *id, const sigset_t *mask) {
    static const char key[] = " ExcNodeList=";
    helper h;
    ckd_error err;
    helper_start(&h, &(helper_orders){.command = "exec scontrol show job -o \"$1\" 2>/dev/null",
                                      .args = (const char *const[]){id, NULL},
                                      .mask = mask,
                                      .limit_s = LIMIT_S,
                                      .listens = true,
                                      .deaf = true});
    helpers_wait(&h, 1, NULL, NULL);
    char *at = h.status == 0 && h.answer ? strstr(h.answer, key) : NULL;
    if (at) {
        at += strlen(key);
        at[strcspn(at, " \n")] = '\0';
        host_list own;
        if (hosts_expand(&own, at, &err) == CKD_OK) { /* "(null)" is no list */
            for (size_t i = 0; i < own.count; i++) {
                hosts_add(to, own.names[i], &err);
            }
            hosts_free(&own);
        }
    }
    helper_free(&h);
}

/* Lists the bad hosts since the command last succeeded, and hosts that were excluded before, separated by commas. */
static char *hosts_to_exclude(const attempt *history, size_t count, const char *id, const sigset_t *mask) {
    host_list all = {0};
    for (size_t i = 0; i < count; i++) {
        add_words(&all, history[i].bad_hosts);
    }
    if (all.count > 0) {
        add_own(&all, id, mask);
    }
    char *text = all.count > 0 ? hosts_joined(&all, ',') : NULL;
    hosts_free(&all);
    return text;
}

char *requeue_command(const attempt *history, size_t count, const sigset_t *mask) {
    const char *id = job_number();
    const attempt *current = decide_current(history, &count);
    char *hosts = id ? hosts_to_exclude(current, count, id, mask) : NULL;
    char *command = NULL;
    /* Only a pending job can be given other hosts. */
    int size = !id     ? -1
               : hosts ? asprintf(&command, "scontrol requeue %s && scontrol update JobId=%s ExcNodeList=%s",
                                  id, id, hosts)
                       : asprintf(&command, "scontrol requeue %s", id);
    free(hosts);
    return size < 0 ? NULL : command;
}

void requeue(const supervise_options *o, const char *command, const sigset_t *mask) {
    helper h;
    if (!o->act) {
        supervise_say(o, "a requeue may help: %.400s", command);
        return;
    }
    supervise_say(o, "requeues the job: %.400s", command);
    helper_start(&h, &(helper_orders){.command = command, .mask = mask, .limit_s = LIMIT_S, .deaf = true});
    helpers_wait(&h, 1, NULL, NULL);
    if (h.late) {
        supervise_say(o, "the job is not requeued: no answer after %d s", LIMIT_S);
    } else if (h.status != 0) {
        supervise_say(o, "the job is not requeued: exit status %d", h.status);
    }
    helper_free(&h);
}
