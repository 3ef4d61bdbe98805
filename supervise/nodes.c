/*
 * Checks the hosts of a job before an attempt, and takes out bad ones: hosts that fail the check, and hosts blamed for
 * failures.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "supervise/internal.h"

#define AT_ONCE   32 /* checks */
#define NOTED_MAX ((size_t)1 << 18)

typedef enum way { WAY_NONE = 0, WAY_REPLACE = 1, WAY_DROP = 2, WAY_REQUEUE = 3, WAY_UNKNOWN = 4 } way;

/* ------------------------------------------------------------------------------------------------- taking hosts out */

static bool was_bad(const nodes *n, const char *host) {
    for (size_t i = 0; i < n->count; i++) {
        if (words_have(n->history[i].bad_hosts, host)) {
            return true;
        }
    }
    return hosts_have(&n->bad, host);
}

/* A spare that is not in use, and was never bad. "": none. */
static void find_spare(char spare[SUPERVISE_NAME_MAX], const nodes *n) {
    host_list spares;
    ckd_error why;
    *spare = '\0';
    if (!n->options->spares_file) {
        return;
    }
    if (hosts_read(&spares, n->options->spares_file, &why) != CKD_OK) {
        supervise_say(n->options, "no spare hosts: %s", why.message);
        return;
    }
    for (size_t i = 0; i < spares.count && !*spare; i++) {
        if (!hosts_have(&n->hosts, spares.names[i]) && !was_bad(n, spares.names[i])) {
            snprintf(spare, SUPERVISE_NAME_MAX, "%s", spares.names[i]);
        }
    }
    hosts_free(&spares);
}

static way find_way(char spare[SUPERVISE_NAME_MAX], const nodes *n) {
    const supervise_options *o = n->options;
    *spare = '\0';
    if (!o->hosts_file) {
        return requeue_possible() ? WAY_REQUEUE : WAY_UNKNOWN;
    }
    find_spare(spare, n);
    return *spare ? WAY_REPLACE : o->min_hosts && n->hosts.count > o->min_hosts ? WAY_DROP : WAY_NONE;
}

static void say_way(const nodes *n, const char *host, const char *why, way by, const char *spare) {
    const supervise_options *o = n->options;
    char what[SUPERVISE_TEXT_MAX * 2];
    switch (by) {
    case WAY_REPLACE:
        snprintf(what, sizeof(what), "%s %.100s takes its place in %.120s",
                 o->act ? "spare" : "with --act, spare", spare, o->hosts_file);
        break;
    case WAY_DROP:
        snprintf(what, sizeof(what), "%s taken out of %.180s", o->act ? "it is" : "with --act, it is",
                 o->hosts_file);
        break;
    case WAY_REQUEUE:
        snprintf(what, sizeof(what), "a requeue %s exclude it", o->act ? "will" : "should");
        break;
    case WAY_NONE:
        snprintf(what, sizeof(what), "it stays, as there is no spare and the job cannot do without it");
        break;
    case WAY_UNKNOWN:
        snprintf(what, sizeof(what), "exclude it from the job");
        break;
    }
    supervise_say(o, "host %s is bad: %.200s; %s", host, why, what);
}

/* Takes out the host, or proposes to. Returns true if the list of hosts has changed. */
static bool take_out(nodes *n, const char *host, const char *why) {
    char spare[SUPERVISE_NAME_MAX];
    ckd_error err;
    ckd_status status = hosts_add(&n->bad, host, &err);
    way by = find_way(spare, n);
    say_way(n, host, why, by, spare);
    if (!n->options->act || status != CKD_OK || by == WAY_NONE || by == WAY_UNKNOWN) {
        return false;
    }
    if (by != WAY_REQUEUE) {
        host_list now;
        status = hosts_replace(n->options->hosts_file, host, *spare ? spare : NULL, &err);
        THEN(status, hosts_of_job(&now, n->options, &err));
        if (status != CKD_OK) {
            supervise_say(n->options, "host %s stays: %s", host, err.message);
            return false;
        }
        hosts_free(&n->hosts);
        n->hosts = now;
    }
    return hosts_add(&n->excluded, host, &err) == CKD_OK && by != WAY_REQUEUE;
}

/* ----------------------------------------------------------------------------------------------------------- checks */

static void begin_check(helper *h, const nodes *n, const char *host) {
    const supervise_options *o = n->options;
    char command[SUPERVISE_TEXT_MAX * 4];
    const char *args[] = {host, o->node_check, NULL};
    bool own = host_is_own(host);
    snprintf(command, sizeof(command), "exec %.900s \"$@\"", o->remote_shell);
    helper_start(h, &(helper_orders){.command = own ? o->node_check : command,
                                     .args = own ? NULL : args,
                                     .mask = n->mask,
                                     .limit_s = o->node_check_s});
}

/* Gets the exit status of the check on each host; -1: it took too long. Returns false if `stop` returned true. */
static bool check_all(int *statuses, const nodes *n, const host_list *hosts) {
    bool going = true;
    for (size_t first = 0; first < hosts->count && going; first += AT_ONCE) {
        helper helpers[AT_ONCE];
        size_t left = hosts->count - first, count = left < AT_ONCE ? left : AT_ONCE;
        for (size_t i = 0; i < count; i++) {
            begin_check(&helpers[i], n, hosts->names[first + i]);
        }
        going = helpers_wait(helpers, count, n->stop, n->stop_context);
        for (size_t i = 0; i < count; i++) {
            statuses[first + i] = helpers[i].late ? -1 : helpers[i].status;
            helper_free(&helpers[i]);
        }
    }
    return going;
}

/*
 * A check that fails on all hosts, or on all that it reaches by the remote shell, proves nothing: a command may be
 * missing.
 */
static void excuse(int *statuses, const nodes *n, const host_list *fresh, const host_list *checked) {
    size_t failed = 0, others = 0, others_failed = 0;
    for (size_t i = 0; i < checked->count; i++) {
        others += !host_is_own(checked->names[i]);
    }
    for (size_t i = 0; i < fresh->count; i++) {
        failed += statuses[i] != 0;
        others_failed += statuses[i] != 0 && !host_is_own(fresh->names[i]);
    }
    bool all = failed > 1 && failed == checked->count;
    if (!all && (others_failed < 2 || others_failed < others)) {
        return;
    }
    supervise_say(n->options, "the check of the hosts fails on each of %zu%s, so it says nothing about them",
                  all ? failed : others_failed, all ? "" : " other hosts");
    for (size_t i = 0; i < fresh->count; i++) {
        statuses[i] = all || !host_is_own(fresh->names[i]) ? 0 : statuses[i];
    }
}

/* Checks the hosts that were not checked yet. Returns true if new hosts were added, which must be checked as well. */
static bool check_new(nodes *n, host_list *checked) {
    host_list fresh = {0};
    ckd_error err;
    bool again = false;
    for (size_t i = 0; i < n->hosts.count; i++) {
        if (!hosts_have(checked, n->hosts.names[i]) &&
            hosts_add(checked, n->hosts.names[i], &err) == CKD_OK) {
            hosts_add(&fresh, n->hosts.names[i], &err);
        }
    }
    int *statuses = calloc(fresh.count + 1, sizeof(*statuses));
    bool whole = statuses && check_all(statuses, n, &fresh);
    if (whole) {
        excuse(statuses, n, &fresh, checked);
    }
    for (size_t i = 0; whole && i < fresh.count; i++) {
        char why[SUPERVISE_TEXT_MAX];
        snprintf(why, sizeof(why), "its check ended with %d", statuses[i]);
        if (statuses[i] < 0) {
            snprintf(why, sizeof(why), "its check has not ended after %" PRIu64 " s",
                     n->options->node_check_s);
        }
        again |= statuses[i] != 0 && take_out(n, fresh.names[i], why);
    }
    free(statuses);
    hosts_free(&fresh);
    return again;
}

void nodes_prepare(nodes *n) {
    ckd_error err;
    host_list checked = {0};
    if (hosts_of_job(&n->hosts, n->options, &err) != CKD_OK) {
        n->hosts = (host_list){0};
        supervise_say(n->options, "the hosts of the job are not known: %s", err.message);
    }
    while (n->options->node_check && check_new(n, &checked)) {
    }
    hosts_free(&checked);
}

/* ------------------------------------------------------------------------------------------------------ the attempt */

/* Records the list, unless it would make a line of the journal too long. It then counts as not known. */
static void record_list(char **to, const host_list *list) {
    free(*to);
    *to = list->count > 0 ? hosts_joined(list, ' ') : NULL;
    if (*to && strlen(*to) > NOTED_MAX) {
        free(*to);
        *to = NULL;
    }
}

void nodes_record(attempt *a, const nodes *n) {
    record_list(&a->hosts, &n->hosts);
    record_list(&a->bad_hosts, &n->bad);
    record_list(&a->excluded, &n->excluded);
}

void nodes_blame(nodes *n, attempt *a) {
    char host[SUPERVISE_NAME_MAX];
    if (decide_bad_host(host, n->history, n->count) && !hosts_have(&n->bad, host)) {
        take_out(n, host, "the only one common to the last attempts, which made no newer checkpoint");
        record_list(&a->bad_hosts, &n->bad);
        record_list(&a->excluded, &n->excluded);
    }
}

void nodes_free(nodes *n) {
    hosts_free(&n->hosts);
    hosts_free(&n->bad);
    hosts_free(&n->excluded);
}
