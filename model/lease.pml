/* The lease protocol: two workers, two jobs of one lane, their supervisors, a reaper, a person.
 *
 * What is here, what is left out, and how to read a trail: docs/model.md. The names are those of the code: `claim`, `start`,
 * `finish` and so on are the statements of store/sql, a worker's steps are those of worker/attempt_execution.py, a
 * folder is the attempt folder of docs/supervisor.md.
 *
 * A step is atomic where the code has one statement, one system call, or one lock. Between two steps of a process the others may
 * take any number of theirs: so every worker may be killed or stopped between any two of its steps, and wake much later.
 *
 * The protocol is broken on purpose by -DNO_FENCE and so on (see VARIANTS in check.py): each must be caught, by the property named
 * there. A property's name is the comment after its assertion, or the name of its formula.
 */

/* How much goes wrong: see the scenes at the end. Whatever goes wrong befalls job 0; job 1 waits after it in its lane. */
byte attempts = 1; /* that job 0 may use */
byte crashes; /* workers killed; a new one takes the place */
byte expires; /* leases that run out while their owner lives: it was stopped, or its beats did not arrive */
byte jumps; /* leases that seem to have run out: the database's clock jumped ahead */
byte kills; /* supervisors killed with -9 */
byte hand_overs; /* workers told to leave while they hold a job */
byte cuts; /* answers to a finish that are lost: it is sent again */
byte cancels[2]; /* requests of a person, per job */
bit late; /* job 1 has not got its place in the lane yet */

#define trouble (crashes + expires + jumps + kills + hand_overs + cuts + cancels[0] + cancels[1])

#define JOBS 2
#define WORKERS 2
#define FOLDERS 3
#define DEAD 2 /* an owner that was killed */
#define NOBODY 3

#define folder_of(j, a) ((j) * 2 + (a) - 1)
#define attempts_of(j) ((j) == 0 -> attempts : 1)

mtype:status = { QUEUED, RUNNING, SUCCEEDED, FAILED, CANCELLED };
mtype:gate = { UNRESOLVED, LANE, OPEN, SHUT };
mtype:phase = { CLOSED, CLAIMED, STARTED };
mtype:trust = { TRUSTED, SUSPENDED, LOST };
mtype:step = { IDLE, FIND, PREPARE, READY, STAGE, SPAWN, BEGIN, BEGUN, WATCH, COLLECT, FINISH, CLEAN, ASKING };
mtype:verb = { NOTHING, TELL_START, TELL_FINISH, TELL_HAND_OVER, TELL_HOLD, TELL_STOP };
mtype:answer = { UNANSWERED, YES, NO };
mtype:supervisor = { GONE, SPAWNED, LOCKED_IN_TIME, LOCKED_LATE, RUNS };
mtype:end = { NOT_YET, ENDED_WELL, ENDED_BADLY, STOPPED, VOIDED, VANISHED };

/* ---- the record ---- */

typedef Job {
  mtype:status status = QUEUED;
  mtype:gate gate = UNRESOLVED;
  mtype:phase phase = CLOSED;
  byte owner = NOBODY;
  byte token;
  byte attempt;
  bit expired;
  bit stop; /* a stop request: cancel */
  bit dismissed;
  /* What the properties look at, and nothing else. */
  byte changes;  /* of ownership: what the token is to count */
  bit accepted;  /* a cancel was answered with yes */
  byte live;     /* children that run */
};
Job job[JOBS];
byte holder = NOBODY; /* of the lane */

#define ended(j) (job[j].status == SUCCEEDED || job[j].status == FAILED || job[j].status == CANCELLED)
#define out_of_the_way(j) (ended(j) && (job[j].status != FAILED || job[j].dismissed))

/* ---- the attempt folders, and who runs in them ---- */

typedef Folder {
  bit spec;
  bit fresh; /* the spec's start_by has not passed */
  bit voids; /* the spec asks for no child: only for the mark that nobody else may start */
  byte token; /* the spec's */
  byte changes;
  bit begun; /* the file `started` */
  mtype:end exit = NOT_YET;
  byte highest; /* the token that the supervisor has seen */
  byte acked; /* the same, in changes of ownership, as adopters were told */
  bit locked_void;
  bit stopping;
  mtype:supervisor by[WORKERS] = GONE; /* the supervisor that this worker started */
  bit once; /* a child ran */
  bit landed; /* a finish landed */
};
Folder at[FOLDERS];

#define held_by(f, w) (at[f].by[w] == LOCKED_IN_TIME || at[f].by[w] == LOCKED_LATE || at[f].by[w] == RUNS)
#define alive(f) (held_by(f, 0) || held_by(f, 1))
#define runs_in(f) (at[f].by[0] == RUNS || at[f].by[1] == RUNS)
#define missing(f) (!alive(f) && !at[f].begun && at[f].exit == NOT_YET)

/* ---- the workers, and what they have written that has not arrived ---- */

typedef Worker {
  mtype:step step = IDLE;
  mtype:trust trust = TRUSTED;
  byte job;
  byte attempt;
  byte token;
  byte changes;
  bit adopted;
  bit claimed_only; /* the phase that the claim told: nothing is known to have started */
  bit hears; /* of the stop request */
  bit told; /* the supervisor, to stop */
  bit adopting; /* the supervisor has not acknowledged our token */
  bit order_fresh; /* the start_by of the order in hand has not passed */
  bit voids;
  bit ran;
  mtype:end end = NOT_YET;
  mtype:answer answer = UNANSWERED;
};
Worker who[WORKERS];

typedef Message {
  mtype:verb verb = NOTHING;
  byte job;
  byte attempt;
  byte token;
  byte changes;
  mtype:end end = NOT_YET;
};
Message sent[WORKERS + 1]; /* after those of the workers: what a dead one had sent */

/* ---- lanes: the one function that moves them; its caller holds the lane's lock ---- */

#ifdef LANE_FORGETS_RETRY
#define keeps_lane(j) (job[j].status == RUNNING || (job[j].status == QUEUED && job[j].attempt == 0))
#else
#define keeps_lane(j) (!ended(j)) /* it runs, waits to be claimed, or is a retry */
#endif

inline settle() {
  if
  :: holder != NOBODY && keeps_lane(holder) -> skip
  :: else ->
    holder = NOBODY;
    if
    :: (job[0].status == FAILED && !job[0].dismissed) || (job[1].status == FAILED && !job[1].dismissed) -> skip
    :: else ->
      if
      :: job[0].gate == LANE -> holder = 0; job[0].gate = OPEN
      :: job[0].gate != LANE && job[1].gate == LANE -> holder = 1; job[1].gate = OPEN
      :: else -> skip
      fi
    fi
  fi;
  assert(holder != NOBODY || job[1].gate != LANE || (job[0].status == FAILED && !job[0].dismissed)) /* no lane hangs */
}

#ifdef LANE_LOOKS_BEFORE_LOCK
bit looked, saw_waiting;
#else
#define looked true
#endif

/* ---- what a worker asks of the database ---- */

inline change_owner(j, w) {
  job[j].owner = w;
  job[j].token++;
  job[j].changes++
}

inline take(w, j, adopts) {
  who[w].job = j;
  who[w].attempt = job[j].attempt;
  who[w].token = job[j].token;
  who[w].changes = job[j].changes;
  who[w].adopted = adopts;
  who[w].claimed_only = (job[j].phase == CLAIMED);
  who[w].trust = TRUSTED;
#ifdef CANCEL_CLEARED_AT_CLAIM
  job[j].stop = 0;
#endif
  who[w].hears = (adopts && job[j].stop);
  job[j].expired = 0
}

inline adopt(w, j) {
  printf("worker %d adopts job %d, attempt %d\n", w, j, job[j].attempt);
  change_owner(j, w);
  take(w, j, 1);
  who[w].step = FIND
}

inline claim(w, j) {
  printf("worker %d claims job %d, attempt %d\n", w, j, job[j].attempt + 1);
  assert(!job[j].accepted); /* no attempt is claimed after a cancel was accepted */
  assert(j == 0 || out_of_the_way(0)); /* a lane goes one at a time and in order */
  assert(job[j].live == 0); /* no new attempt while one runs */
  job[j].status = RUNNING;
  job[j].gate = SHUT;
  job[j].phase = CLAIMED;
  job[j].attempt++;
  change_owner(j, w);
  take(w, j, 0);
  who[w].step = PREPARE
}

inline forget(w) { /* a worker's hands are empty */
  who[w].step = IDLE;
  who[w].trust = TRUSTED;
  who[w].job = 0;
  who[w].attempt = 0;
  who[w].token = 0;
  who[w].changes = 0;
  who[w].adopted = 0;
  who[w].claimed_only = 0;
  who[w].hears = 0;
  who[w].told = 0;
  who[w].adopting = 0;
  who[w].order_fresh = 0;
  who[w].voids = 0;
  who[w].ran = 0;
  who[w].end = NOT_YET;
  who[w].answer = UNANSWERED
}

inline send(w, what) {
  sent[w].verb = what;
  sent[w].job = who[w].job;
  sent[w].attempt = who[w].attempt;
  sent[w].token = who[w].token;
  sent[w].changes = who[w].changes;
  sent[w].end = who[w].end
}

inline drop(m) {
  sent[m].verb = NOTHING;
  sent[m].job = 0;
  sent[m].attempt = 0;
  sent[m].token = 0;
  sent[m].changes = 0;
  sent[m].end = NOT_YET
}

/* A beat, where it brings news: it renews, tells of a stop request, or says that the lease is lost. */
#define beats_home(w) (job[who[w].job].owner == w && job[who[w].job].token == who[w].token && job[who[w].job].status == RUNNING)
#define has_news(w) ( \
  (beats_home(w) && (job[who[w].job].expired || who[w].trust == SUSPENDED || (job[who[w].job].stop && !who[w].hears))) \
  || (!beats_home(w) && who[w].trust != LOST))
#define looks_at_lease(w) (who[w].step == PREPARE || who[w].step == READY || who[w].step == WATCH || who[w].step == COLLECT)

inline beat(w) {
  if
  :: beats_home(w) ->
    printf("worker %d beats: yours, stop request %d\n", w, job[who[w].job].stop);
    job[who[w].job].expired = 0;
    who[w].trust = TRUSTED;
    who[w].hears = job[who[w].job].stop
  :: else ->
    printf("worker %d beats: lost\n", w);
    who[w].trust = LOST
  fi
}

/* ---- what a worker does ---- */

#define mine folder_of(who[w].job, who[w].attempt)

#if defined(LOCK_IS_RUNNING) || defined(ADOPT_RESTARTS)
#define can_be_told(f) true
#else
#define can_be_told(f) (!alive(f) || at[f].begun)
#endif

/* How an attempt's end is told: as succeeded, failed, cancelled, or to be tried again. */
inline look_at_end(w) {
  if
  :: at[mine].exit == NOT_YET -> who[w].end = VANISHED
  :: else -> who[w].end = at[mine].exit
  fi;
  if
  :: !who[w].hears && (who[w].end == STOPPED || who[w].end == VOIDED) ->
    who[w].hears = (beats_home(w) && job[who[w].job].stop);
    if
    :: who[w].hears -> skip
    :: else -> who[w].end = VANISHED
    fi
  :: else -> skip
  fi;
  if
  :: who[w].hears && (who[w].end == VANISHED || who[w].end == VOIDED) -> who[w].end = STOPPED
  :: else -> skip
  fi
}

inline write_spec(w) {
  printf("worker %d writes the spec of %d.%d\n", w, who[w].job, who[w].attempt);
  at[mine].spec = 1;
  at[mine].fresh = who[w].order_fresh;
  at[mine].voids = who[w].voids;
  at[mine].token = who[w].token;
  at[mine].changes = who[w].changes
}

#ifdef ADOPTER_GIVES_BACK
inline give_back(w) { /* as it was, the token too: else a model that counts for ever has no loop to be found */
  if
  :: beats_home(w) ->
    printf("worker %d gives job %d back for another to start\n", w, who[w].job);
    job[who[w].job].owner = NOBODY;
    job[who[w].job].token--;
    job[who[w].job].changes--
  :: else -> skip
  fi;
  forget(w)
}
#endif

/* Not every step looks whether the lease is lost: a worker that was stopped goes on until one does. */
proctype work(byte w) {
end_of_work:
  do
  /* claim: first adopt, then take what the lane lets through */
  :: d_step {
      who[w].step == IDLE && job[0].status == RUNNING && job[0].owner == NOBODY -> adopt(w, 0)
    }
  :: d_step {
      who[w].step == IDLE && job[1].status == RUNNING && job[1].owner == NOBODY -> adopt(w, 1)
    }
  :: d_step { /* the two workers are alike: the first claim is worker 0's */
      who[w].step == IDLE && job[0].status == QUEUED && job[0].gate == OPEN && (w == 0 || job[0].attempt > 0) -> claim(w, 0)
    }
  :: d_step {
      who[w].step == IDLE && job[1].status == QUEUED && job[1].gate == OPEN && (w == 0 || job[0].attempt > 0) -> claim(w, 1)
    }
  :: d_step { looks_at_lease(w) && has_news(w) -> beat(w) }

  /* find what runs or ran */
  :: d_step { /* a lock without `started` says nothing yet: its supervisor may find that it is too late, and leave no trace */
      who[w].step == FIND && can_be_told(mine) ->
      if
#ifdef ADOPT_RESTARTS
      :: true ->
        printf("worker %d takes the attempt for lost\n", w);
        who[w].end = (who[w].hears -> STOPPED : VANISHED);
        who[w].step = FINISH
#else
      :: !missing(mine) ->
        printf("worker %d finds it, running %d\n", w, alive(mine));
        who[w].adopting = alive(mine);
        who[w].ran = 1;
        who[w].step = (who[w].claimed_only -> BEGUN : WATCH)
      :: missing(mine) && !who[w].claimed_only ->
        printf("worker %d finds nothing, and it had been started: lost\n", w);
        who[w].end = (who[w].hears -> STOPPED : VANISHED);
        who[w].step = FINISH
      :: missing(mine) && who[w].claimed_only ->
        printf("worker %d finds nothing, and it had not been started\n", w);
#ifdef ADOPTER_GIVES_BACK
        give_back(w)
#else
        who[w].adopting = 1;
        who[w].step = PREPARE
#endif
#endif
      fi
    }

  /* still wanted? */
  :: d_step {
      who[w].step == PREPARE && who[w].trust == LOST -> printf("worker %d leaves\n", w); forget(w)
    }
  :: d_step {
      who[w].step == PREPARE && who[w].trust != LOST ->
      who[w].hears = (who[w].hears || (beats_home(w) && job[who[w].job].stop));
      if
      :: !who[w].hears -> who[w].step = READY
      :: who[w].hears && !who[w].adopted ->
        printf("worker %d ends the attempt without a start\n", w);
        who[w].end = STOPPED;
        who[w].step = FINISH
      :: who[w].hears && who[w].adopted ->
#ifdef ENDS_WITHOUT_MARKER
        printf("worker %d ends the attempt without a start, and leaves no marker\n", w);
        who[w].end = STOPPED;
        who[w].step = FINISH
#else
        printf("worker %d makes sure that nobody starts it any more\n", w);
        who[w].voids = 1;
        who[w].step = READY
#endif
      fi
    }

  /* start: an order is made while the lease is trusted, staged, and a supervisor spawned */
  :: d_step { who[w].step == READY && who[w].trust == LOST -> printf("worker %d leaves\n", w); forget(w) }
  :: d_step { who[w].step == READY && who[w].trust == TRUSTED -> who[w].order_fresh = 1; who[w].step = STAGE }
  :: d_step {
      who[w].step == STAGE ->
      if
#ifdef SPEC_NOT_RENEWED
      :: at[mine].spec -> printf("worker %d finds a spec of %d.%d, and leaves it as it is\n", w, who[w].job, who[w].attempt)
#endif
      :: else -> write_spec(w)
      fi;
      who[w].order_fresh = 0;
      who[w].step = SPAWN
    }
  :: d_step {
      who[w].step == SPAWN && at[mine].by[w] == GONE ->
      printf("worker %d spawns a supervisor in %d.%d\n", w, who[w].job, who[w].attempt);
      at[mine].by[w] = SPAWNED;
      who[w].step = BEGIN
    }
  :: d_step { /* ours began, or another one's did */
      who[w].step == BEGIN && (at[mine].begun || at[mine].exit != NOT_YET) ->
      who[w].ran = 1;
      who[w].step = (at[mine].exit == VOIDED -> WATCH : BEGUN)
    }
  :: d_step { /* too late, or another one was first and then too late */
      who[w].step == BEGIN && at[mine].by[w] == GONE && missing(mine) -> who[w].step = READY
    }
  :: d_step { who[w].step == BEGUN && sent[w].verb == NOTHING && who[w].answer == UNANSWERED -> send(w, TELL_START) }
  :: d_step {
      who[w].step == BEGUN && who[w].answer != UNANSWERED ->
      if
      :: who[w].answer == YES -> who[w].answer = UNANSWERED; who[w].step = WATCH
      :: else -> printf("worker %d leaves\n", w); forget(w)
      fi
    }

  /* watch, stop, hand over */
  :: d_step { who[w].step == WATCH && sent[w].verb == NOTHING && who[w].trust == LOST -> printf("worker %d leaves\n", w); forget(w) }
  :: d_step { who[w].step == WATCH && sent[w].verb == NOTHING && who[w].trust != LOST && !alive(mine) -> who[w].step = COLLECT }
  :: d_step { /* tell its supervisor whose it is now */
      who[w].step == WATCH && sent[w].verb == NOTHING && alive(mine) && who[w].trust == TRUSTED && who[w].adopting ->
      send(w, TELL_HOLD)
    }
  :: d_step {
      who[w].step == WATCH && sent[w].verb == NOTHING && alive(mine) && who[w].trust == TRUSTED && who[w].hears && !who[w].told ->
      who[w].told = 1;
      send(w, TELL_STOP)
    }
  :: d_step {
      who[w].step == WATCH && sent[w].verb == NOTHING && alive(mine) && who[w].trust != LOST && who[w].job == 0 && hand_overs > 0 ->
      hand_overs--;
      who[w].step = ASKING;
      send(w, TELL_HAND_OVER)
    }
  :: d_step { who[w].step == ASKING && who[w].answer != UNANSWERED -> forget(w) }

  /* collect, finish, clean up */
  :: d_step { who[w].step == COLLECT && who[w].trust == LOST -> printf("worker %d leaves\n", w); forget(w) }
  :: d_step {
      who[w].step == COLLECT && who[w].trust == TRUSTED -> look_at_end(w); who[w].step = FINISH
    }
  :: d_step { who[w].step == FINISH && sent[w].verb == NOTHING && who[w].answer == UNANSWERED -> send(w, TELL_FINISH) }
  :: d_step {
      who[w].step == FINISH && who[w].answer != UNANSWERED ->
      if
      :: who[w].answer == YES && who[w].ran -> who[w].answer = UNANSWERED; who[w].step = CLEAN
#ifdef REFUSED_FINISH_REPEATED
      :: who[w].answer == NO -> printf("worker %d sends its finish again\n", w); who[w].answer = UNANSWERED
#endif
      :: else -> forget(w)
      fi
    }
  :: d_step {
      who[w].step == FINISH && who[w].answer == YES && cuts > 0 ->
      printf("the answer to worker %d is lost\n", w);
      cuts--;
      who[w].answer = UNANSWERED
    }
  :: d_step { /* a worker that was stopped before the start finds `started` */
      who[w].step == CLEAN ->
      at[mine].spec = 0;
      at[mine].fresh = 0;
      at[mine].voids = 0;
      at[mine].token = 0;
      at[mine].changes = 0;
      at[mine].exit = NOT_YET;
#ifdef FINISH_LEAVES_NO_MARKER
      at[mine].begun = 0;
#else
      at[mine].begun = (at[mine].begun && who[w].adopted);
#endif
      forget(w)
    }

  /* killed: what it had sent may still arrive; another worker takes its place */
  :: d_step {
      who[w].step != IDLE && who[w].job == 0 && crashes > 0 ->
      printf("worker %d is killed\n", w);
      crashes--;
      if
      :: sent[w].verb != NOTHING ->
        sent[WORKERS].verb = sent[w].verb;
        sent[WORKERS].job = sent[w].job;
        sent[WORKERS].attempt = sent[w].attempt;
        sent[WORKERS].token = sent[w].token;
        sent[WORKERS].changes = sent[w].changes;
        sent[WORKERS].end = sent[w].end;
        drop(w)
      :: else -> skip
      fi;
      if
      :: beats_home(w) -> job[who[w].job].owner = DEAD
      :: else -> skip
      fi;
      forget(w)
    }
  od
}

/* ---- what arrives: at the database, at a supervisor ---- */

#define fenced(m) (its.token == sent[m].token && its.status == RUNNING)
#define told folder_of(sent[m].job, sent[m].attempt)
#define its job[sent[m].job]
#define in_time(m) (its.changes == sent[m].changes)

inline reply(m, what) {
  if
  :: m < WORKERS -> who[m].answer = what
  :: else -> skip
  fi;
  drop(m)
}

inline land_finish(m) {
  assert(in_time(m)); /* no stale write lands */
  assert(its.attempt == sent[m].attempt); /* no write about an attempt that is over lands */
  assert(!at[told].landed); /* one finish per attempt */
  assert(its.live == 0); /* nothing ends while it runs */
  assert(sent[m].end != VANISHED || at[told].once); /* what never ran is not called lost */
  assert(at[told].exit != STOPPED || sent[m].end == STOPPED || !its.accepted); /* what a cancel ended is cancelled */
  at[told].landed = 1;
  its.owner = NOBODY;
  its.phase = CLOSED;
  its.expired = 0;
  if
  :: sent[m].end == ENDED_WELL -> printf("job %d has succeeded\n", sent[m].job); its.status = SUCCEEDED
  :: sent[m].end == STOPPED -> printf("job %d is cancelled\n", sent[m].job); its.status = CANCELLED
  :: else -> /* again, if attempts are left; the stop request is looked at here, in the same statement */
    if
#ifndef REQUEUE_IGNORES_STOP
    :: its.attempt < attempts_of(sent[m].job) && its.stop ->
      printf("job %d is cancelled instead of tried again\n", sent[m].job);
      its.status = CANCELLED
    :: its.attempt < attempts_of(sent[m].job) && !its.stop ->
#else
    :: its.attempt < attempts_of(sent[m].job) ->
#endif
      printf("job %d is to be tried again\n", sent[m].job);
      its.status = QUEUED;
      its.gate = OPEN
    :: else -> printf("job %d has failed\n", sent[m].job); its.status = FAILED
    fi
  fi;
#ifdef LANE_LOOKS_BEFORE_LOCK
  if
  :: holder == sent[m].job && ended(sent[m].job) && !saw_waiting -> holder = NOBODY /* nobody waited when it looked */
  :: else -> settle()
  fi;
  looked = 0; saw_waiting = 0
#else
  settle()
#endif
}

proctype deliver(byte m) {
end_of_delivery:
  do
  :: d_step {
      sent[m].verb == TELL_START ->
      if
      :: fenced(m) ->
        assert(in_time(m)); /* no stale write lands */
        printf("the record says that %d.%d started\n", sent[m].job, sent[m].attempt);
        its.phase = STARTED;
        reply(m, YES)
      :: else -> reply(m, NO)
      fi
    }
#ifdef LANE_LOOKS_BEFORE_LOCK
  :: d_step { sent[m].verb == TELL_FINISH && !looked -> looked = 1; saw_waiting = (job[1].gate == LANE) }
#endif
  :: d_step {
      sent[m].verb == TELL_FINISH && looked ->
      if
#ifdef NO_FENCE
      :: its.status == RUNNING ->
#else
      :: fenced(m) ->
#endif
        land_finish(m);
        reply(m, YES)
      :: else -> /* it may have landed before: same token, no open attempt */
        if
        :: its.token == sent[m].token && its.phase == CLOSED -> reply(m, YES)
        :: else -> printf("a late finish of %d.%d changes nothing\n", sent[m].job, sent[m].attempt); reply(m, NO)
        fi
      fi
    }
  :: d_step {
      sent[m].verb == TELL_HAND_OVER ->
      if
      :: fenced(m) && its.owner != NOBODY ->
        assert(in_time(m)); /* no stale write lands */
        printf("job %d is handed over\n", sent[m].job);
        its.expired = 0;
        its.owner = NOBODY;
        its.token++;
        its.changes++;
        reply(m, YES)
      :: else -> reply(m, NO)
      fi
    }
  :: d_step { /* a command: the supervisor refuses a token lower than the highest it has seen */
      (sent[m].verb == TELL_HOLD || sent[m].verb == TELL_STOP) && (runs_in(told) || !alive(told)) ->
      if
#ifdef SUPERVISOR_IGNORES_TOKEN
      :: runs_in(told) ->
#else
      :: runs_in(told) && sent[m].token >= at[told].highest ->
#endif
        assert(sent[m].changes >= at[told].acked); /* once an adoption is done, its former owner has no say */
        at[told].highest = sent[m].token;
        at[told].acked = sent[m].changes;
        if
        :: sent[m].verb == TELL_STOP -> printf("%d.%d is told to stop\n", sent[m].job, sent[m].attempt); at[told].stopping = 1
        :: else -> printf("%d.%d knows its new owner\n", sent[m].job, sent[m].attempt)
        fi
      :: else -> printf("a command to %d.%d changes nothing\n", sent[m].job, sent[m].attempt)
      fi;
      if
      :: m < WORKERS -> who[m].adopting = 0 /* acknowledged, or refused: then the next beat says why */
      :: else -> skip
      fi;
      drop(m)
    }
  od
}

/* ---- supervisors, and the sweep of their folders ---- */

#define same_job(f) (f == 2 -> 1 : 0)
#define same_attempt(f) (f == 1 -> 2 : 1)
#define is_open(f) (job[same_job(f)].attempt == same_attempt(f) && job[same_job(f)].phase != CLOSED)

inline over(f, w, how) {
  at[f].by[w] = GONE;
  at[f].stopping = 0;
  at[f].highest = 0;
  at[f].acked = 0;
  at[f].exit = how;
  job[same_job(f)].live--
}

proctype supervise(byte f, w) {
end_of_supervision:
  do
  :: d_step { /* take the lock, look for `started`, read the spec */
      at[f].by[w] == SPAWNED ->
      if
#ifndef START_NOT_EXCLUSIVE
      :: alive(f) || at[f].begun || at[f].exit != NOT_YET || !at[f].spec ->
        printf("the supervisor of worker %d leaves %d.%d\n", w, same_job(f), same_attempt(f));
        at[f].by[w] = GONE
#else
      :: !at[f].spec -> at[f].by[w] = GONE
#endif
      :: else ->
        at[f].highest = at[f].token;
        at[f].acked = at[f].changes;
        at[f].locked_void = at[f].voids;
#ifdef NO_START_BY
        at[f].by[w] = LOCKED_IN_TIME
#else
        at[f].by[w] = (at[f].fresh -> LOCKED_IN_TIME : LOCKED_LATE)
#endif
      fi
    }
  :: d_step {
      at[f].by[w] == LOCKED_LATE ->
      printf("the supervisor of worker %d is too late for %d.%d\n", w, same_job(f), same_attempt(f));
      at[f].by[w] = GONE;
      at[f].highest = 0;
      at[f].acked = 0;
      at[f].locked_void = 0
    }
  :: d_step { /* write `started`, let the child go */
      at[f].by[w] == LOCKED_IN_TIME ->
      at[f].begun = 1;
      if
      :: at[f].locked_void ->
        printf("%d.%d will not be started\n", same_job(f), same_attempt(f));
        at[f].exit = VOIDED;
        at[f].highest = 0;
        at[f].acked = 0;
        at[f].locked_void = 0;
        at[f].by[w] = GONE
      :: else ->
        printf("%d.%d RUNS, by the supervisor of worker %d\n", same_job(f), same_attempt(f), w);
        assert(job[0].live == 0 && job[1].live == 0); /* one live attempt per job, one job per lane */
        assert(!at[f].once); /* each attempt starts once */
        assert(is_open(f)); /* no attempt starts after its end */
        at[f].once = 1;
        at[f].by[w] = RUNS;
        job[same_job(f)].live++
      fi
    }
  :: d_step { at[f].by[w] == RUNS && at[f].stopping -> printf("%d.%d is stopped\n", same_job(f), same_attempt(f)); over(f, w, STOPPED) }
  :: d_step { at[f].by[w] == RUNS && !at[f].stopping -> printf("%d.%d exits well\n", same_job(f), same_attempt(f)); over(f, w, ENDED_WELL) }
  :: d_step { f != 2 && at[f].by[w] == RUNS && !at[f].stopping -> printf("%d.%d exits badly\n", same_job(f), same_attempt(f)); over(f, w, ENDED_BADLY) }
  :: d_step { /* the child dies with it */
      f != 2 && at[f].by[w] == RUNS && kills > 0 ->
      kills--;
      printf("the supervisor of %d.%d is killed\n", same_job(f), same_attempt(f));
      over(f, w, NOT_YET)
    }
  od
}

/* Folders of attempts that are over: stop what runs, remove what is left, and keep the mark for longer than any start_by. */
#define before_its_start(w) (who[w].step == FIND || who[w].step == PREPARE || who[w].step == READY || who[w].step == STAGE \
  || who[w].step == SPAWN || who[w].step == BEGIN)
#define may_order(w) (who[w].trust == TRUSTED && before_its_start(w))
#define about_to_start(f, w) (folder_of(who[w].job, who[w].attempt) == f && (may_order(w) || who[w].order_fresh))
proctype sweep(byte f) {
end_of_sweep:
  do
  :: d_step {
      at[f].spec && !is_open(f) && !(alive(f) && at[f].stopping) ->
      if
      :: alive(f) -> at[f].stopping = 1
      :: else ->
        printf("what is left of %d.%d is swept\n", same_job(f), same_attempt(f));
        at[f].spec = 0;
        at[f].fresh = 0;
        at[f].voids = 0;
        at[f].token = 0;
        at[f].changes = 0;
#ifdef SWEEP_LEAVES_NO_MARKER
        at[f].begun = 0;
#endif
        at[f].exit = NOT_YET
      fi
    }
  :: d_step {
      at[f].begun && !at[f].spec && !is_open(f) && !about_to_start(f, 0) && !about_to_start(f, 1) ->
      printf("the mark of %d.%d is swept\n", same_job(f), same_attempt(f));
      at[f].begun = 0
    }
  od
}

/* ---- time, and the reaper ---- */

inline run_out(j, in_truth) {
  job[j].expired = 1;
  if
  :: in_truth -> /* then the margin has passed before: nothing ordered under this lease may start */
    who[job[j].owner].trust = SUSPENDED;
    who[job[j].owner].order_fresh = 0;
    if
    :: at[folder_of(j, job[j].attempt)].token == job[j].token -> at[folder_of(j, job[j].attempt)].fresh = 0
    :: else -> skip
    fi
  :: else -> skip
  fi
}

proctype reap(byte j) {
end_of_reaping:
  do
  :: d_step {
      j == 0 && expires > 0 && job[j].status == RUNNING && job[j].owner < WORKERS && !job[j].expired ->
      printf("the lease of worker %d runs out\n", job[j].owner);
      expires--;
      run_out(j, true)
    }
  :: d_step {
      j == 0 && jumps > 0 && job[j].status == RUNNING && job[j].owner < WORKERS && !job[j].expired ->
      printf("the database's clock jumps: the lease of worker %d seems to have run out\n", job[j].owner);
      jumps--;
      run_out(j, false)
    }
#ifndef NO_REAP
  :: d_step { /* reap; or a neighbour holds the dead one's lock file */
      job[j].status == RUNNING && (job[j].owner == DEAD || (job[j].owner < WORKERS && job[j].expired)) ->
      printf("job %d is taken from its owner, dead %d\n", j, job[j].owner == DEAD);
      job[j].expired = 0;
      job[j].owner = NOBODY;
#ifndef NO_TOKEN_AT_REAP
      job[j].token++;
#endif
      job[j].changes++
    }
#endif
  od
}

/* ---- people ---- */

proctype person(byte j) {
end_of_person:
  do
  :: d_step { /* job 1 was accepted; somebody gives it its place in the lane */
      j == 1 && job[1].gate == UNRESOLVED && job[1].status == QUEUED ->
      printf("job 1 takes its place in the lane\n");
      job[1].gate = LANE;
      settle()
    }
  :: d_step {
      cancels[j] > 0 && !ended(j) ->
      cancels[j]--;
      printf("job %d is asked to cancel\n", j);
      job[j].accepted = 1;
      if
      :: job[j].status == QUEUED ->
        job[j].status = CANCELLED;
        job[j].gate = SHUT;
        settle()
      :: else -> job[j].stop = 1
      fi
    }
  :: d_step {
      job[j].status == FAILED && !job[j].dismissed ->
      printf("job %d is dismissed\n", j);
      job[j].dismissed = 1;
      settle()
    }
  od
}

/* From some time on nothing goes wrong any more: trouble that is still to come must not be what saves a job. */
proctype calm() {
end_of_trouble:
  do
  :: d_step {
      trouble > 0 ->
      printf("nothing goes wrong any more\n");
      crashes = 0; expires = 0; jumps = 0; kills = 0; hand_overs = 0; cuts = 0; cancels[0] = 0; cancels[1] = 0
    }
  od
}

/* ---- the end ---- */

#define all_ended (ended(0) && ended(1))
#define nothing_runs (job[0].live == 0 && job[1].live == 0)
#define nobody_works (who[0].step == IDLE && who[1].step == IDLE)

#define scene(n) (!defined_scene || n == defined_scene)
#ifdef SCENE
#define defined_scene SCENE
#else
#define defined_scene 0
#endif

init {
  atomic {
    job[0].gate = OPEN;
    holder = 0;
    if
    :: scene(1) -> printf("a worker is killed, a person cancels\n"); crashes = 1; cancels[0] = 1; attempts = 2
    :: scene(2) -> printf("a worker is stopped, a person cancels\n"); expires = 1; cancels[0] = 1; attempts = 2
    :: scene(3) -> printf("one is stopped, one is killed\n"); crashes = 1; expires = 1
    :: scene(4) -> printf("the clock jumps, a person cancels\n"); jumps = 1; cancels[0] = 1
    :: scene(5) -> printf("a worker hands over, another is stopped\n"); hand_overs = 1; expires = 1
    :: scene(6) -> printf("a supervisor is killed, and a worker\n"); kills = 1; crashes = 1; attempts = 2
    :: scene(7) -> printf("answers are lost, a worker is stopped\n"); cuts = 1; expires = 1; attempts = 2
    :: scene(8) -> printf("a job joins the lane, and is cancelled\n"); crashes = 1; cancels[1] = 1; late = 1
    :: scene(9) -> printf("the clock jumps, a worker is killed\n"); jumps = 1; crashes = 1
    fi;
    job[1].gate = (late -> UNRESOLVED : LANE);
    run work(0);
    run work(1);
    run deliver(0);
    run deliver(1);
    run deliver(2);
    run supervise(0, 0);
    run supervise(0, 1);
    run supervise(1, 0);
    run supervise(1, 1);
    run supervise(2, 0);
    run supervise(2, 1);
    run sweep(0);
    run sweep(1);
    run sweep(2);
    run reap(0);
    run reap(1);
    run calm();
    run person(0);
    run person(1)
  }
  /* When nothing can move any more, all is done. */
  timeout ->
  assert(all_ended); /* at a standstill every job has ended */
  assert(nothing_runs); /* at a standstill nothing is left running */
  assert(nobody_works) /* at a standstill nobody waits */
}

/* That it comes to a standstill at all, only a formula can say: who goes round in circles is caught by no assertion. */
#ifdef ENDS
ltl every_job_ends { <> all_ended }
#endif
#ifdef RESTS
ltl everybody_comes_to_rest { <> (all_ended && nothing_runs && nobody_works) }
#endif
