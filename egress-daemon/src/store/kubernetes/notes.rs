//! Events (`events.k8s.io`), which `kubectl describe` shows below an object. They are informational: a note that cannot be sent is dropped.

use super::cache::Cache;
use crate::store::Note;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Client;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;

/// The timeout for sending a note.
const REQUEST: Duration = Duration::from_secs(5);
/// The maximum length of a note that an API server accepts, in bytes.
const LONGEST: usize = 1_024;
/// The end of a truncated note.
const CUT: &str = " ...";

/// Sends notes sequentially.
pub(super) async fn send(client: Client, cache: Arc<Cache>, reporter: &'static str, mut notes: mpsc::Receiver<Note>) {
    let instance = nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok());
    let reporter = Reporter { controller: reporter.to_owned(), instance };
    while let Some(note) = notes.recv().await {
        let about = &note.about;
        // `kubectl describe` finds the event by the uid. A removed object has none in the cache.
        let object = cache.get(about.kind, &about.key).and_then(|object| about.kind.encode(&object));
        let uid = object.as_ref().and_then(|object| object.pointer("/metadata/uid")).and_then(Value::as_str);
        let reference = ObjectReference {
            api_version: Some(about.kind.api_version().to_owned()),
            kind: Some(about.kind.name().to_owned()),
            name: Some(about.key.name.clone()),
            namespace: Some(about.key.namespace.clone()).filter(|namespace| !namespace.is_empty()),
            uid: uid.map(ToOwned::to_owned),
            ..Default::default()
        };
        let event = Event {
            type_: if note.warning { EventType::Warning } else { EventType::Normal },
            reason: note.reason.to_owned(),
            note: Some(cut(&note.message)),
            action: note.reason.to_owned(),
            secondary: None,
        };
        // A recorder counts an event with the reason of an earlier one about the object as its repetition, and sends the earlier message.
        let recorder = Recorder::new(client.clone(), reporter.clone());
        match tokio::time::timeout(REQUEST, recorder.publish(&event, &reference)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(%about, %error, "cannot record an event"),
            Err(_) => tracing::debug!(%about, "cannot record an event: the API server does not answer"),
        }
    }
}

/// Truncates a message to the accepted length. Messages of conditions may be longer.
fn cut(message: &str) -> String {
    match message.len() <= LONGEST {
        true => message.to_owned(),
        false => format!("{}{CUT}", &message[..message.floor_char_boundary(LONGEST - CUT.len())]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Key, Kind, ObjectRef};
    use axum::{Router, extract::State, routing::post};
    use std::sync::Mutex;

    async fn create(State(seen): State<Arc<Mutex<Vec<Value>>>>, sent: String) -> String {
        seen.lock().unwrap().push(serde_json::from_str::<Value>(&sent).unwrap()["note"].take());
        sent
    }

    #[tokio::test]
    async fn each_note_is_an_event_with_its_own_message() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let server = Router::new().route("/apis/events.k8s.io/v1/namespaces/default/events", post(create));
        let (notes, waiting) = mpsc::channel(2);
        for message in ["gw1 carries it", "gw2 carries it"] {
            let about = ObjectRef { kind: Kind::EgressIP, key: Key::cluster("192.0.2.1") };
            notes.send(Note { about, warning: false, reason: "Moved", message: message.into() }).await.unwrap();
        }
        drop(notes);
        let client = Client::new(server.with_state(Arc::clone(&seen)), "default");
        send(client, Arc::default(), "spillway-controller", waiting).await;
        assert_eq!(*seen.lock().unwrap(), ["gw1 carries it", "gw2 carries it"]);
    }

    #[test]
    fn a_note_has_at_most_the_length_that_the_api_server_accepts() {
        let fits = "x".repeat(LONGEST);
        assert_eq!(cut(&fits), fits);
        assert_eq!(cut(&(fits.clone() + "x")), format!("{}{CUT}", &fits[CUT.len()..]));
        // The last character must not be split.
        let wide = "é".repeat(LONGEST);
        let cut = cut(&format!("x{wide}"));
        assert!(cut.len() == LONGEST - 1 && cut.ends_with(&format!("é{CUT}")), "{}", cut.len());
    }
}
